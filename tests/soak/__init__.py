"""The soak: what people leave running, killed, starved and fuzzed."""
