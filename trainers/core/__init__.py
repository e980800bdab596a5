"""The base of all methods: granularities, nested hidden states, objectives and the trainer."""
