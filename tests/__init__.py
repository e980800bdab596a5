"""Tests, which mirror the tree."""

import os


# Before any library reads it: tests make no network calls.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
