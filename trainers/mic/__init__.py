"""MIC: less redundant (SCR) and more isotropic (SIR) prefixes."""
