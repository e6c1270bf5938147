"""Bad inputs to every command, made by lot: see `generator` for what is made, `property` for what must hold."""
