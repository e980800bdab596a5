"""The commands of m3BERT, installed as `m3bert.commands`. In a checkout, `python -m scripts.NAME` runs one, too."""
