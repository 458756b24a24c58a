// Icons as paths: characters would be empty boxes in fonts that lack them.
const PATHS = {
  plus: "M12 5v14M5 12h14",
  close: "M6 6l12 12M18 6L6 18",
  left: "M15 5l-7 7 7 7",
  right: "M9 5l7 7-7 7",
  down: "M12 5v14M5 12l7 7 7-7",
  up: "M12 19V5M5 12l7-7 7 7",
  below: "M6 9l6 6 6-6",
  pencil: "M4 20l1-5L16 4l4 4L9 19l-5 1zM14 6l4 4",
  copy: "M9 9h9a2 2 0 0 1 2 2v9a2 2 0 0 1-2 2h-9a2 2 0 0 1-2-2v-9a2 2 0 0 1 2-2zM4 16a2 2 0 0 1-1-2V4a2 2 0 0 1 2-2h9a2 2 0 0 1 2 1",
  check: "M5 13l5 5L20 7",
  eye: "M2 12c3-5 6.5-7 10-7s7 2 10 7c-3 5-6.5 7-10 7s-7-2-10-7zM12 9a3 3 0 1 0 0 6a3 3 0 1 0 0-6",
  again: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  forward: "M4 5l8 7-8 7zM13 5l8 7-8 7z",
  trash: "M4 7h16M9 7V4h6v3M6 7l1 13h10l1-13M10 11v5M14 11v5",
  stop: "M7 7h10v10H7z",
  bars: "M5 20v-6M12 20V4M19 20v-9",
  side: "M4 4h16a1 1 0 0 1 1 1v14a1 1 0 0 1-1 1H4a1 1 0 0 1-1-1V5a1 1 0 0 1 1-1zM9 4v16",
  sliders: "M4 7h9M19 7h1M4 17h1M11 17h9M16 4.5a2.5 2.5 0 1 0 0 5a2.5 2.5 0 1 0 0-5M8 14.5a2.5 2.5 0 1 0 0 5a2.5 2.5 0 1 0 0-5",
  more: "M5 11v2M12 11v2M19 11v2",
  book: "M5 4h11a3 3 0 0 1 3 3v13H8a3 3 0 0 1-3-3zM5 17a3 3 0 0 1 3-3h11",
  pin: "M9 4h6l-1 6 3 3H7l3-3zM12 13v7",
  menu: "M4 6h16M4 12h16M4 18h16",
  mic: "M12 3a3 3 0 0 0-3 3v5a3 3 0 0 0 6 0V6a3 3 0 0 0-3-3zM6 11a6 6 0 0 0 12 0M12 17v4",
  camera: "M4 8h4l1.5-3h5L16 8h4a1 1 0 0 1 1 1v9a1 1 0 0 1-1 1H4a1 1 0 0 1-1-1V9a1 1 0 0 1 1-1zM12 10a3.5 3.5 0 1 0 0 7a3.5 3.5 0 1 0 0-7",
  image: "M4 5h16a1 1 0 0 1 1 1v12a1 1 0 0 1-1 1H4a1 1 0 0 1-1-1V6a1 1 0 0 1 1-1zM3 17l5-5 4 4 3-3 6 5M15.5 8a1.5 1.5 0 1 0 0 3a1.5 1.5 0 1 0 0-3",
  file: "M6 2h8l5 5v14a1 1 0 0 1-1 1H6a1 1 0 0 1-1-1V3a1 1 0 0 1 1-1zM14 2v5h5",
  folder: "M3 6a1 1 0 0 1 1-1h5l2 3h9a1 1 0 0 1 1 1v9a1 1 0 0 1-1 1H4a1 1 0 0 1-1-1z",
  tool: "M14.5 6a4.5 4.5 0 0 1 5.8-2.3l-3 3 .8 2.4 2.4.8 3-3A4.5 4.5 0 0 1 15 12L7 20a2.1 2.1 0 0 1-3-3l8-8a4.5 4.5 0 0 1 2.5-3z",
  contrast: "M12 3a9 9 0 1 0 0 18a9 9 0 1 0 0-18M12 3v18M12 8h6.5M12 12h9M12 16h6.5",
  sun: "M12 8a4 4 0 1 0 0 8a4 4 0 1 0 0-8M12 2v3M12 19v3M2 12h3M19 12h3M5 5l2 2M17 17l2 2M5 19l2-2M17 7l2-2",
  chat: "M4 5h16a1 1 0 0 1 1 1v10a1 1 0 0 1-1 1h-9l-5 4v-4H4a1 1 0 0 1-1-1V6a1 1 0 0 1 1-1z",
  columns: "M4 5h6v14H4zM14 5h6v14h-6z",
  text: "M4 6h16M4 10h16M4 14h16M4 18h9",
  server: "M4 4h16v6H4zM4 14h16v6H4zM7.500 7h1M7.500 17h1",
  globe: "M12 3a9 9 0 1 0 0 18a9 9 0 1 0 0-18M3 12h18M12 3c3 2.500 4 6 4 9s-1 6.500-4 9c-3-2.500-4-6-4-9s1-6.500 4-9",
  moon: "M20 14A8.5 8.5 0 1 1 10 4a7 7 0 0 0 10 10z",
};

export type IconName = keyof typeof PATHS;

/** An icon; the label of its button gives the meaning. */
export function Icon({ name }: { name: IconName }) {
  return (
    <svg class="icon" viewBox="0 0 24 24" aria-hidden="true">
      <path d={PATHS[name]} />
    </svg>
  );
}
