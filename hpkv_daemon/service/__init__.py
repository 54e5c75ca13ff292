"""What the daemon does with a request: sessions, engines, transfers and the verbs. No sockets here."""
