"""One module or folder a framework: its seams, the roles of its collectives, and the shared parts of attaching."""
