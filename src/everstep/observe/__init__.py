"""What happened, for people and programs: the journal, and what is folded and shown from it. No
torch."""
