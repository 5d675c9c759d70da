"""What is known of a run: its progress, its losses (PLS), its policy, and reports of its recoveries."""
