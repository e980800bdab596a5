"""A small m3BERT, pretrained through all stages."""
