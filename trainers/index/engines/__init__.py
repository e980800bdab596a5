"""Adapters of the engines, one file each; [`~index.engine.find_engine`] imports the one that is asked for."""
