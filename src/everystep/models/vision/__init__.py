"""Vision towers: what makes features of pictures for a decoder to read, and where those stand."""
