"""What is put in place of what heads compute: other weights, other runs' values, a pattern. Ours."""
