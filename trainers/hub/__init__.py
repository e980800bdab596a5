"""What a checkpoint says about itself: its training record and its sentence-transformers modules."""
