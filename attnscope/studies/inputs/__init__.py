"""What a study is asked with: models, texts, photos, recordings, and which heads."""
