"""Bad inputs to every command, made at random: see `generator` for what is made, `property` for what must hold."""
