"""After a failure: who lost what, where it comes from, and what it cost."""
