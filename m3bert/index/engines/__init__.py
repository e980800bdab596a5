"""Adapters of the vector stores, one file each; [`~index.engine.find_engine`] imports one by its name."""
