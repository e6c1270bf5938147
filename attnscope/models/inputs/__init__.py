"""Models whose inputs the user makes: any torch module, with the names of its positions."""
