"""What is solved: task families, their registry, chat rendering and warm-up play. Nothing here reaches torch."""
