"""OCR: how well a picture spells the text that its prompt asks for."""
