"""What tests of programs built on Midstream need: servers that misbehave, and clocks that stand still."""
