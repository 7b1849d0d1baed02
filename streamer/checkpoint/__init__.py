"""What a checkpoint says about itself: headers, index, choice of files. Pure: bytes in, data out."""
