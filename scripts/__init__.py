"""The commands of m3BERT, installed as `m3bert.commands`."""

if __name__ == "scripts":
    raise ImportError("Import m3bert.commands: the folder scripts is a part of the package m3bert.")
