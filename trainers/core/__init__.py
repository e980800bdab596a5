"""The base of all methods: the trainer, its arguments and its model, objectives and their terms, publication."""
