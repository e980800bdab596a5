"""m3BERT, stages 1 and 2: masked language models of every granularity, and their distillation."""
