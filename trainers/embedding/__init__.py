"""Parts of several methods: InfoNCE, the objective and the trainer of embeddings, teachers."""
