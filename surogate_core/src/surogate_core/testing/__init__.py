"""What authors of plugins test their work with."""
