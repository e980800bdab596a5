"""Small tools that know nothing of encoders."""
