"""Loading together: the ranks of one machine fetch every byte once and hand it to each other in shared memory."""
