"""The base of all methods: granularities, nested states, objectives and the trainer."""
