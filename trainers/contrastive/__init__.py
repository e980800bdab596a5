"""Contrastive training of every granularity: MRL, stage 3 of m3BERT, and pairs with scores."""
