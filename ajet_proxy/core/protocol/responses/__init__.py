"""The Responses API: what is asked for, how an answer is read, and how a history of items is known and continued."""
