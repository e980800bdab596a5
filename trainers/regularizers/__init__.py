"""Objectives that go with a contrastive one: they shape token states and embeddings, and make none by themselves."""

from .hsic import HSIC
from .pic import PIC
from .scr import SCR
from .sia import SIA
from .sir import SIR


__all__ = ["HSIC", "PIC", "SCR", "SIA", "SIR"]
