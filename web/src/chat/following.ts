// Following the end of a list that grows, until the reader leaves it.
import type { HTMLAttributes, RefObject } from "preact";
import { useLayoutEffect, useMemo, useState } from "preact/hooks";

const NEAR_END = 60; // pixels
const KEYS_UP = ["PageUp", "ArrowUp", "Home"];

export interface Following {
  isFollowing: boolean;
  /** Scroll to the end and stay there. */
  toEnd: () => void;
  /** Event handlers of the scrolled element. */
  on: Pick<HTMLAttributes<HTMLDivElement>, "onWheel" | "onKeyDown" | "onTouchStart" | "onTouchMove" | "onScroll">;
}

/**
 * Keeps the scrolled element `place` at its end while `content`, its only child, changes its height. Scrolling up with the
 * wheel, a key, a finger or the scroll bar ends that; scrolling down to the end, `toEnd` or a new `subject` begins it again.
 */
export function useFollowing(place: RefObject<HTMLElement | null>, content: RefObject<HTMLElement | null>, subject: string): Following {
  const [isFollowing, setFollowing] = useState(true);
  const handlers = useMemo(() => {
    let follows = true;
    let top = 0;
    let height = 0;
    let touchedAt = 0;

    function change(wanted: boolean): void {
      follows = wanted;
      setFollowing(wanted);
    }
    function toEnd(): void {
      const { current } = place;
      if (!current) return;
      current.scrollTop = current.scrollHeight;
      top = current.scrollTop;
      height = current.scrollHeight;
    }
    function leave(): void {
      const { current } = place;
      if (current && current.scrollHeight > current.clientHeight) change(false);
    }
    return {
      follow: () => {
        change(true);
        toEnd();
      },
      resized: () => {
        if (follows) toEnd();
      },
      // The events of an input come before the scrolling that it causes: text that arrives between them must not undo it.
      on: {
        onWheel: (event: WheelEvent) => event.deltaY < 0 && !event.ctrlKey && leave(),
        onKeyDown: ({ key, shiftKey, target }: KeyboardEvent) => {
          const isTyped = (target as Element).closest("textarea, input") !== null;
          if (!isTyped && (KEYS_UP.includes(key) || (key === " " && shiftKey))) leave();
        },
        onTouchStart: (event: TouchEvent) => (touchedAt = event.touches[0]!.clientY),
        onTouchMove: (event: TouchEvent) => event.touches[0]!.clientY > touchedAt && leave(),
        // The scroll bar, a search in the page, focus that moves. Content that shrinks scrolls up too: its height tells.
        onScroll: () => {
          const { scrollTop, scrollHeight, clientHeight } = place.current!;
          const left = scrollHeight - scrollTop - clientHeight;
          if (scrollTop < top && scrollHeight >= height && left > 1) change(false);
          else if (scrollTop > top && left < NEAR_END) change(true);
          top = scrollTop;
          height = scrollHeight;
        },
      },
    };
  }, []);

  useLayoutEffect(handlers.follow, [subject]);
  useLayoutEffect(handlers.resized); // before what was drawn is painted
  useLayoutEffect(() => {
    // Heights also change later: messages are laid out when they come into view, code is colored, the composer grows.
    const sizes = new ResizeObserver(handlers.resized);
    sizes.observe(place.current!);
    sizes.observe(content.current!);
    return () => sizes.disconnect();
  }, []);
  return { isFollowing, toEnd: handlers.follow, on: handlers.on };
}
