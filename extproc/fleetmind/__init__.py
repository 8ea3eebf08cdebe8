"""WHERE: the sites a request may go to, and what going there costs in seconds."""
