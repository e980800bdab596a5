"""Objectives that methods combine. Each is one part of MIPIC, MIC or IBKD, with its own arguments."""
