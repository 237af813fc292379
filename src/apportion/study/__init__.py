"""Methods side by side: the family table, method cards, studies and their reports."""
