"""What a sequence cut over ranks is, as data: layouts, masks, and the plan that follows from both."""
