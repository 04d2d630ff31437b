"""`surogate watch`: runs in the terminal. `runs.py` reads their files, `screen.py` draws them."""
