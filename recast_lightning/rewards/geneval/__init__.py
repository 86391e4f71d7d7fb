"""GenEval: objects, their number, colours and positions, by way of an object detector."""
