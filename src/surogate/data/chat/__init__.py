"""Conversations: from the messages of a row to tokens, and which of them are trained."""
