"""
Small tools that know nothing of encoders: `durable` (whole files, one writer), `typed` (checked JSON), `hashing`,
`extras` (optional packages), `help_texts` (options), `lazy` (names of a package), `columns`, `words`,
`numerics`, `papers`.
"""
