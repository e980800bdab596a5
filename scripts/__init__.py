"""The commands of m3BERT, installed as `m3bert.commands`."""
