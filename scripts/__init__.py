"""
The commands of m3BERT, installed as `m3bert.commands`.

A command is a module with a docstring (its help), a dataclass of `option`s and `main(arguments)`, which
`m3bert/cli.py` lists. It checks options and files before it imports torch. Commands share `command` (parsing,
overwriting, next steps), `encoder` (options of an encoder), `sources` (defaults), `backbone` and `training_data` (of
`train`).
"""

if __name__ == "scripts":
    raise ImportError("Import m3bert.commands: the folder scripts is a part of the package m3bert.")
