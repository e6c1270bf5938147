"""What all records share: their codec, their files, their kinds."""
