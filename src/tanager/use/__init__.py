"""Use a trained model: from images or features to classes, and how good they are."""
