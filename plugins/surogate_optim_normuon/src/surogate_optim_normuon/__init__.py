"""NorMuon for Surogate."""
