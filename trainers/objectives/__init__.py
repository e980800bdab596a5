"""The terms of the methods: what the papers add to, or put in place of, a contrastive loss."""
