"""Methods to compare with: SimCSE, ESE, 2DMSE, Starbucks."""
