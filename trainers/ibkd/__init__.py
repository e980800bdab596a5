"""IBKD: distillation with an information bottleneck."""
