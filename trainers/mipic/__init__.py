"""MIPIC: self-distilled token relations (SIA), and a chain from shallow to deep (PIC)."""
