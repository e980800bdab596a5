"""Model cards of elastic checkpoints, and their publication on the Hub."""

if __name__ == "hub_cards":
    raise ImportError("Import m3bert.hub_cards: the folder hub_cards is a part of the package m3bert.")
