"""RoboScene-VQA: rendered robot scenes, questions with known answers, and their evidence."""
