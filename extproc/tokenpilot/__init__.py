"""WHICH: the instance that answers soonest, everything priced in seconds."""
